"""scikit-learn's ``n_jobs`` with our processes: the results are those of joblib's own."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.multiprocessing.programs import run_program

pytestmark = [pytest.mark.slow, pytest.mark.time_limit(120)]

SEARCHES = """
import joblib
from sklearn.datasets import load_digits
from sklearn.ensemble import RandomForestClassifier
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV, cross_val_score
from nbparallel.multiprocessing import household

mp.register_joblib()

class Steep(LogisticRegression):  # a class of the script itself
    def fit(self, X, y):
        super().fit(X, y)
        self.coef_ = np.round(self.coef_, 6)
        return self

def fit_forest(x, y):
    forest = RandomForestClassifier(20, random_state=0, n_jobs=2).fit(x, y)
    return forest.predict_proba(x), [tree.tree_.threshold for tree in forest.estimators_]

def search(x, y):
    found = GridSearchCV(Steep(max_iter=300), {"C": [0.1, 1.0]}, cv=3, n_jobs=2).fit(x, y)
    return found.best_params_, found.cv_results_["mean_test_score"], found.best_estimator_.coef_

def validate(x, y):
    return cross_val_score(RandomForestClassifier(10, random_state=0), x, y, cv=4, n_jobs=2)

def same(a, b):
    if isinstance(a, dict):
        return a == b
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return np.array_equal(a, b)
"""


@pytest.mark.parametrize("kind", ["private", "shared"])
def test_same_results_as_loky(kind: str, tmp_path: Path) -> None:
    """Of a forest, a grid search and cross-validation, bit by bit, on private and on shared arrays.

    scikit-learn is among the packages that the tests need (requirements/test.txt), so that this test fails
    where it is missing.
    """
    assert find_spec("sklearn") is not None, "scikit-learn is missing: see requirements/test.txt"
    run_program(
        SEARCHES
        + f"""
kind = {kind!r}
x, y = load_digits(return_X_y=True)
x, y = np.ascontiguousarray(x[:600]), y[:600]
x = np.tile(x, (1, 3))  # more than 256 KiB: it travels as memory
mine = (nbp.share(x), nbp.share(y)) if kind == "shared" else (x, y)
for work in (fit_forest, search, validate):
    with joblib.parallel_config(backend="loky"):
        theirs = work(x, y)
    with joblib.parallel_config(backend="nbparallel"):
        ours = work(*mine)
    assert same(theirs, ours), (work.__name__, theirs, ours)
    assert len(household.report().processes) >= 2, "our processes did not run it"
assert nbp.is_shared(mine[0]) == (kind == "shared")
joblib.externals.loky.get_reusable_executor().shutdown()
""",
        tmp_path,
        "forkserver",
        limit=110,
    )
