import pytest

from triaccel_ray.service.searches.search import grace_epochs


@pytest.mark.parametrize(("num_epochs", "grace"), [(1, 1), (2, 2), (5, 2), (8, 2), (12, 3), (20, 5)])
def test_no_trial_is_stopped_for_what_its_first_epoch_took(num_epochs: int, grace: int) -> None:
    assert grace_epochs(num_epochs) == grace
