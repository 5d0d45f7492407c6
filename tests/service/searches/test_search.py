import pytest

from triaccel_ray.service.searches.trial import grace_epochs


@pytest.mark.parametrize(("num_epochs", "grace"), [(1, 1), (2, 2), (5, 2), (8, 4), (12, 6), (20, 10)])
def test_no_trial_is_stopped_for_what_its_first_epoch_took(num_epochs: int, grace: int) -> None:
    assert grace_epochs(num_epochs) == grace
