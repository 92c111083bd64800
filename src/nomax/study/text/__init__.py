"""Studies of text: set-ups, one file for each study, and the parts that several of them share."""
