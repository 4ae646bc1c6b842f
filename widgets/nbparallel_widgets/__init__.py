"""Views for notebooks: the timeline's picture and the live panel; no private attribute of the core.

They are ordinary outputs, without scripts and widgets.  Loading the magics imports no module that needs numpy.
"""
