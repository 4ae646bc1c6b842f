"""The output of ranks on its way into the notebook: blocks, labels, order, overflow."""
