"""StatsForecast on Fugue's Ray engine: forecasts of eight series in four parts, compared with one process."""

import json

import numpy as np
import pandas as pd
import ray
from statsforecast import StatsForecast
from statsforecast.models import AutoETS, SeasonalNaive

steps = np.arange(60)
series = pd.concat(
    pd.DataFrame(
        {
            "unique_id": f"s{number}",
            "ds": pd.date_range("2020-01-01", periods=60, freq="D"),
            "y": 10 + number * np.sin(2 * np.pi * steps / 7) + 0.1 * steps,
        }
    )
    for number in range(8)
)


def forecast(frame):
    found = StatsForecast(models=[SeasonalNaive(7), AutoETS(season_length=7)], freq="D").forecast(df=frame, h=5)
    found = found if isinstance(found, pd.DataFrame) else found.to_pandas()
    return found.sort_values(["unique_id", "ds"]).reset_index(drop=True)


if __name__ == "__main__":
    ray.init(num_cpus=2)
    found, right = forecast(ray.data.from_pandas(series).repartition(4)), forecast(series)
    print(json.dumps({
        "ray": ray.__file__,
        "rows": len(found),
        "same_naive": bool(np.allclose(found["SeasonalNaive"], right["SeasonalNaive"])),
        "same_ets": bool(np.allclose(found["AutoETS"], right["AutoETS"])),
    }))  # fmt: skip
