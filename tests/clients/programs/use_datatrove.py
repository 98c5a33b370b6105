"""A pipeline of datatrove on its Ray executor: documents are read, filtered and written."""

import glob
import gzip
import json
import os
import tempfile
from pathlib import Path

import ray
from datatrove.executor.ray import RayPipelineExecutor
from datatrove.pipeline.filters import LambdaFilter
from datatrove.pipeline.readers import JsonlReader
from datatrove.pipeline.writers import JsonlWriter

place = tempfile.mkdtemp()
os.makedirs(f"{place}/in")
for number in range(4):
    with open(f"{place}/in/{number}.jsonl", "w") as file:
        for length in range(1, 50):
            file.write(json.dumps({"text": "word " * length, "id": f"{number}-{length}"}) + "\n")
RayPipelineExecutor(
    pipeline=[
        JsonlReader(f"{place}/in"),
        LambdaFilter(lambda document: len(document.text) > 100),
        JsonlWriter(f"{place}/out"),
    ],
    tasks=4, workers=2, logging_dir=f"{place}/logs",
).run()  # fmt: skip
kept = [len(gzip.decompress(Path(name).read_bytes()).splitlines()) for name in glob.glob(f"{place}/out/*")]
print(json.dumps({"ray": ray.__file__, "kept": kept}))
