"""One address for many engines: sessions keep their engine, dead engines are left, replies go on elsewhere."""
