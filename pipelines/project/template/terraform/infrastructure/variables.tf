variable "project" {
  description = "Project of the runs; it exists, with billing."
  type        = string
}

variable "region" {
  description = "Region of runs, bucket and repositories: reading from another one costs time and money."
  type        = string
  default     = "europe-west4"
}

variable "bucket" {
  description = "Name of the bucket to create, without gs://."
  type        = string

  validation {
    condition     = can(regex("^[a-z0-9][a-z0-9_-]{1,61}[a-z0-9]$", var.bucket))
    error_message = "A name of 3 to 63 lower-case letters, digits, - and _, without gs://."
  }
}

variable "prefix" {
  description = "Prefix of accounts, repositories, topic and secrets, such as \"test-\": another installation in the project."
  type        = string
  default     = ""

  validation {
    condition     = can(regex("^([a-z][a-z0-9-]{0,20}-)?$", var.prefix))
    error_message = "At most 22 lower-case letters, digits and -, a letter first and - last."
  }
}

variable "submitters" {
  description = "People and CI who push, submit and explain runs: user:ada@example.com, group:..., serviceAccount:..."
  type        = set(string)
  default     = []
}

variable "noncurrent_days" {
  description = "Days after which a version that was overwritten or deleted is gone for good."
  type        = number
  default     = 30
}

variable "runs_days" {
  description = "Age in days at which files below runs/ are deleted. null keeps them. A later run misses the files of a step that it takes from the cache: submit it with --no-cache."
  type        = number
  default     = null
}

variable "untagged_days" {
  description = "Age in days at which images without a tag are deleted, also those that a schedule names by digest. null keeps them."
  type        = number
  default     = null
}

variable "alerts" {
  description = "Whether to create a Pub/Sub topic that is told how runs ended."
  type        = bool
  default     = false
}

variable "mlflow_uri" {
  description = "MLflow server that runs log to; \"\" for none."
  type        = string
  default     = ""
}

variable "secrets" {
  description = "Secrets to create, without a value: webhook (its URL), mlflow (the token of that server)."
  type        = set(string)
  default     = []

  validation {
    condition     = length(setsubtract(var.secrets, ["webhook", "mlflow"])) == 0
    error_message = "Only webhook and mlflow."
  }
}
