"""What every other package stands on, without torch: records, configuration, errors, random streams."""
