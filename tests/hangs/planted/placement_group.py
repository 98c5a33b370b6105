"""A placement group that does not fit.

kind: likely
cause: Its bundle asks for more CPUs than any node has.
remedy: Smaller bundles, or STRICT_PACK no more.
names: placement group
"""

import hpcray as ray
from hpcray.util.placement_group import placement_group

ray.init()
group = placement_group([{"CPU": 4096}])
print("MARK", flush=True)
ray.get(group.ready())
