"""Clusters that batch scripts start node by node, as on Ray: `ray start`, `ray stop`, `ray symmetric-run`, and how
`init()` finds such a cluster.

`clusters` and `order` decide, without I/O; `registry` keeps the secrets and the calls of a user in private files;
`presence` is what each `init()` asks first; `keeper` holds a node; `lookup` is what it asks then.
"""
