"""The served model beside the engine: text, templates, adapters."""
