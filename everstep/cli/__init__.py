"""The operator's command line, over the controller's REST API."""
