"""Tables, figures and pages of finished runs, read from their directories alone.

`read` and `tables` need nothing beyond the standard library; `html` and `plots` need the extra `report`.
"""
