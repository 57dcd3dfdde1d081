"""Ray reads these when it is imported: before the tests."""

import os
import secrets

os.environ |= {
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": secrets.token_hex(16),
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_raylet_start_wait_time_s": "60",
    "RAY_metrics_report_interval_ms": "1000",
    "OMP_NUM_THREADS": "1",
}
