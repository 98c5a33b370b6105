"""NeMo Curator: JSON lines are read, filtered and written, on its executors Xenna and Ray actor pool."""

import json
import os
import tempfile
from pathlib import Path

import ray
from nemo_curator.backends.ray_actor_pool import RayActorPoolExecutor
from nemo_curator.backends.xenna import XennaExecutor
from nemo_curator.pipeline import Pipeline
from nemo_curator.stages.text.filters import ScoreFilter
from nemo_curator.stages.text.filters.heuristic import WordCountFilter
from nemo_curator.stages.text.io.reader import JsonlReader
from nemo_curator.stages.text.io.writer import JsonlWriter

place = tempfile.mkdtemp()
os.makedirs(f"{place}/in")
with open(f"{place}/in/a.jsonl", "w") as file:
    file.writelines(json.dumps({"text": "word " * length, "id": length}) + "\n" for length in range(100))
kept = []
for number, executor in enumerate([XennaExecutor, RayActorPoolExecutor]):
    ray.init(num_cpus=8, ignore_reinit_error=True)
    pipeline = Pipeline(name="long")
    pipeline.add_stage(JsonlReader(f"{place}/in"))
    pipeline.add_stage(ScoreFilter(WordCountFilter(min_words=50), text_field="text"))
    pipeline.add_stage(JsonlWriter(f"{place}/out{number}"))
    files = [name for task in pipeline.run(executor()) for name in task.data]
    kept.append(sum(len(Path(name).read_text().splitlines()) for name in files))
print(json.dumps({"ray": ray.__file__, "kept": kept}))
