"""Which nodes are near each other: what the batch system and the machine know, as labels of the nodes and as an order.

`node_labels` reads what Slurm says about the network, and gives each node its labels when it starts;
`node_order` draws the network and puts nodes into an order in which neighbours follow each other. The kernel knows none
of these modules: it reads one label, `hpcray.io/switch-path`, as the place of a node.
"""
