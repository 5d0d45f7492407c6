"""A search with Ray Tune for thresholds on `digits`, from Python: about a minute on a CPU, without a download."""

from triaccel_ray import search

report = search("digits", trials=2, epochs=3, margin=5)  # margin: percentage points that a trial may be below AMP
print(report)  # tables and recommendation; in a notebook, `report` alone shows the page
if report.best is not None:
    reached, control = report.best.best, report.control  # ControlLoop(..., config=control) trains with these
    print(f"best: {reached.metric:.1f} % in {reached.seconds_per_epoch:.2f} s an epoch")
    print(f"tau {control.precision.tau_low:.1e} to {control.precision.tau_high:.1e}")
    print(f"rho {control.batch.rho_low:.2f} to {control.batch.rho_high:.2f}")
