"""Views for notebooks: the timeline's picture and the live panel; no private attribute of the core.

Only `panel` imports ipywidgets, and nothing is imported before a magic needs it.
"""
