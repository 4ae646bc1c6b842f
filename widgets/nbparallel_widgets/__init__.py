"""Views for notebooks: the timeline's picture and the live panel; no private attribute of the core.

They are ordinary outputs, without scripts or widgets.  Loading the magics imports none that needs numpy.
"""
