"""Services beside Everstep, real or as stubs: databases, schedulers, identity providers, browsers and stores."""
