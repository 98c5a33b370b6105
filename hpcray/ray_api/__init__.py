"""Ray's REST API for jobs, for clients that are not hpcray's: `hpcray dashboard --ray-api`.

Nothing here runs unless a user asks for it in hpcray's own words. Commands and programs of hpcray do not need it: they
reach a cluster over its Unix sockets.
"""
