"""The parameter server of asynchronous training: weights in a process of their own, for workers to pull and push to."""
