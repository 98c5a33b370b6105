"""The features of hpcray in raylets. Loaded with the raylet, after its workers' template process was forked."""

from __future__ import annotations

from hpcray.autoscaler.autoscaler_runner import AutoscalerRunner
from hpcray.diagnostics.raylet_introspection import RayletIntrospection
from hpcray.runtime.node.node_features import NodeFeatures

NODE_FEATURES = NodeFeatures(autoscaling=AutoscalerRunner, diagnostics=RayletIntrospection)
