"""Pure functions from rewards to advantages and from log-probs to losses. To add one, write it and add a line to its dict."""
