"""Makes several processes one job: they find each other, agree, watch each other, and end together."""
