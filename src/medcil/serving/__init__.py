"""A model behind a local page and a JSON API. Docs: docs/how-to/serve.md."""
