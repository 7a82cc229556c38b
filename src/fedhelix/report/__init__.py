"""Tables, figures and reports of runs: they read run folders, finished or not, and write none."""
