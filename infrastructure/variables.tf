variable "project" {
  description = "Project of the runs; it exists, with billing."
  type        = string
}

variable "bucket" {
  description = "Name of the bucket to create, without gs://."
  type        = string
}

variable "region" {
  description = "Region of runs, bucket and repositories: reading from another one costs time and money."
  type        = string
  default     = "europe-west4"
}

variable "submitters" {
  description = "People and CI who push, submit and explain runs: user:ada@example.com, group:..., serviceAccount:..."
  type        = set(string)
  default     = []
}

variable "secrets" {
  description = "Names of secrets to create, such as that of a webhook's address or of an MLflow token."
  type        = set(string)
  default     = []
}
