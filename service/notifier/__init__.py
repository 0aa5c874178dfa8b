"""The notifier: posts a webhook for the end of each request to the endpoint of its tenant."""
