"""Training on a data set of demonstrations or pairs of responses, and making one by sampling."""
