"""The largest eigenvalues of each layer's curvature: power iteration, Gauss-Newton or empirical Fisher."""
