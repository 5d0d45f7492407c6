"""The view of a stored result: a run, a search or a comparison."""

from __future__ import annotations

from triaccel_ray.service.compare.comparison import read_comparison
from triaccel_ray.service.report.comparison import view_comparison
from triaccel_ray.service.report.report import View
from triaccel_ray.service.report.run import view_run
from triaccel_ray.service.report.search import view_search
from triaccel_ray.service.runs.record import read_run
from triaccel_ray.service.search.search import read_search
from triaccel_ray.service.storage.layout import COMPARISON, PAGE_FILES, SEARCH
from triaccel_ray.service.storage.mirror import upload
from triaccel_ray.service.storage.storage_path import StoragePath


def view_at(place: StoragePath) -> View:
    """Returns the view of the run, search or comparison at `place`; writes its page, also to a remote store.

    Raises:
        LogError: there is no such result, or it is damaged.
    """
    folder = place.folder
    if (folder / SEARCH).exists():
        view = view_search(read_search(folder))
    elif (folder / COMPARISON).exists():
        view = view_comparison(read_comparison(folder))
    else:
        view = view_run(read_run(folder))
    upload(place, PAGE_FILES)  # only warns if the store is read-only for this user
    return view
