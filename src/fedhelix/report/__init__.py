"""Tables and pictures of runs. They read run folders only, finished or not, and never change them."""
