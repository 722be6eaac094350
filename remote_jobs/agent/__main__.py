"""`python3 remote_jobs/agent/__main__.py ...` from a checkout; a release has its own __main__.py beside the package."""

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

from remote_jobs.agent.main import main

if __name__ == "__main__":
    sys.exit(main())
