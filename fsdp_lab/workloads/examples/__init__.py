"""The models and data sets that come with fsdp_lab, named by `_target_` as the user's are."""
