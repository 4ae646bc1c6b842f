"""The rank's side: template, main loop, shell, output."""
