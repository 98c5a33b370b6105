"""Nested cross-validation of a scikit-learn pipeline, on the nodes of a job through joblib.

    hpcray-launch -n 4 examples/gallery/crossval/crossval.py --picture scores.png

`joblib.parallel_backend("ray")` makes each fit a task; the program's scikit-learn code is unchanged. The same search
runs without hpcray too, and has to give the same scores.
"""

from __future__ import annotations

import argparse
import time

import joblib
import numpy as np
from sklearn.datasets import load_digits
from sklearn.decomposition import PCA
from sklearn.model_selection import GridSearchCV, StratifiedKFold
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.svm import SVC

import hpcray as ray
from hpcray.util.joblib import register_ray


def grid_search(folds: int, components: list[int], widths: list[float]) -> GridSearchCV:
    """The search, fitted to the digits with whatever backend joblib has now."""
    images, labels = load_digits(return_X_y=True)
    pipeline = make_pipeline(StandardScaler(), PCA(random_state=0), SVC())
    grid = {"pca__n_components": components, "svc__gamma": widths}
    search = GridSearchCV(pipeline, grid, cv=StratifiedKFold(folds, shuffle=True, random_state=0), n_jobs=-1)
    return search.fit(images, labels)


def draw(scores: np.ndarray, components: list[int], widths: list[float], path: str) -> None:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 3.5), layout="constrained")
    shown = axes.imshow(scores, vmin=0.8, aspect="auto", cmap="viridis")
    axes.set_xticks(range(len(widths)), [f"{width:.0e}" for width in widths])
    axes.set_yticks(range(len(components)), components)
    axes.set(xlabel="gamma of the kernel", ylabel="principal components")
    figure.colorbar(shown, label="accuracy")
    figure.savefig(path, dpi=90)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a small grid")
    parser.add_argument("--picture", metavar="FILE", help="draw the accuracies")
    given = parser.parse_args()
    folds = 3 if given.quick else 10
    components = [10, 30] if given.quick else [5, 10, 15, 20, 30, 40]
    widths = [0.01, 0.03] if given.quick else [0.001, 0.003, 0.01, 0.03, 0.1]

    ray.init()
    register_ray()
    begin = time.perf_counter()
    with joblib.parallel_backend("ray"):
        found = grid_search(folds, components, widths)
    seconds = time.perf_counter() - begin
    begin = time.perf_counter()
    with joblib.parallel_backend("sequential"):
        expected = grid_search(folds, components, widths)
    alone = time.perf_counter() - begin
    scores = found.cv_results_["mean_test_score"]
    fits = len(scores) * folds
    print(f"{fits} fits: {seconds:.1f} s on the job's nodes, {alone:.1f} s in one process")
    print(f"best accuracy {found.best_score_:.4f} with {found.best_params_}")
    assert np.allclose(scores, expected.cv_results_["mean_test_score"]) and found.best_score_ > 0.95
    if given.picture:
        draw(scores.reshape(len(components), len(widths)), components, widths, given.picture)
    print("checked")


if __name__ == "__main__":
    main()
