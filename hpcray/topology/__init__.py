"""Which nodes are near each other: what the batch system and the machine know, as labels of the nodes and as an order.

`switches` reads what Slurm says about the network, `node_labels` gives each node its labels when it starts, and
`node_order` draws the network and puts nodes into an order in which neighbours follow each other. The kernel knows none
of these modules: it reads one label, `hpcray.io/switch-path`, as the place of a node.
"""
