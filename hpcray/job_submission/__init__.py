"""Jobs that are submitted into a running cluster, as `ray.job_submission` has them."""

from hpcray.job_submission.job_records import DriverInfo, JobDetails, JobType
from hpcray.job_submission.job_submission_client import JobSubmissionClient
from hpcray.state.job_table import JobErrorType, JobInfo, JobStatus

__all__ = ["DriverInfo", "JobDetails", "JobErrorType", "JobInfo", "JobStatus", "JobSubmissionClient", "JobType"]
