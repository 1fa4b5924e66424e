"""Files and folders of checkpoints: nothing in them is trusted."""
