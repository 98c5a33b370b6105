"""Jobs that are submitted into a running cluster, as `ray.job_submission` has them."""

from hpcray.job_submission.job_submission_client import DriverInfo, JobDetails, JobSubmissionClient, JobType
from hpcray.state.job_table import JobErrorType, JobInfo, JobStatus

__all__ = ["DriverInfo", "JobDetails", "JobErrorType", "JobInfo", "JobStatus", "JobSubmissionClient", "JobType"]
