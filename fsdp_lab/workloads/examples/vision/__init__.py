"""Image classification: the models and the data sets, one file each."""
