"""Image classification: the models, the data sets and the task, one file each."""
