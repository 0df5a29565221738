"""Ray is imported here, before its warnings become errors; without it there are no tests in this folder."""

import warnings

collect_ignore_glob: list[str] = []

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    try:
        import ray.cluster_utils
        import ray.serve.config  # noqa: F401
    except ModuleNotFoundError:
        collect_ignore_glob = ["test_*.py"]
