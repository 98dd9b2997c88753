"""Image classification: the models and the data sets, one file each."""

# Tensor parallelism divides the MLPs. Attention stays whole on each rank: torchvision packs queries, keys and values
# into one parameter. The plan is here, so that a command knows it without PyTorch.
VIT_TP_PLAN = {"encoder.layers.encoder_layer_*.mlp.0": "colwise", "encoder.layers.encoder_layer_*.mlp.3": "rowwise"}
