terraform {
  required_version = ">= 1.3"
  required_providers {
    google = {
      source  = "hashicorp/google"
      version = "~> 6.50"
    }
  }
  # The state is a file here. A team shares it: https://developer.hashicorp.com/terraform/language/backend/gcs
}

provider "google" {
  project = var.project
  region  = var.region
}

# The APIs that runs call. They stay on when the rest is destroyed: others in the project may use them.
resource "google_project_service" "apis" {
  for_each = toset([
    "aiplatform", "artifactregistry", "storage", "logging", "iam", "compute", "cloudresourcemanager", "secretmanager",
    "serviceusage",
  ])
  service            = "${each.value}.googleapis.com"
  disable_on_destroy = false
}

# Runs, scheduled ones too, are this account: a schedule has no identity of its own.
resource "google_service_account" "trainer" {
  account_id   = "trainer"
  display_name = "Runs of pipelines"
  depends_on   = [google_project_service.apis]
}

# Training runs the code of models, as an account that cannot write champions.
resource "google_service_account" "training" {
  account_id   = "training"
  display_name = "Training jobs"
  depends_on   = [google_project_service.apis]
}

# Creates and reads jobs, writes logs, and reads them to explain a failure.
resource "google_project_iam_member" "trainer" {
  for_each = toset(["roles/aiplatform.user", "roles/logging.logWriter", "roles/logging.viewer"])
  project  = var.project
  role     = each.value
  member   = google_service_account.trainer.member
}

# Replicas write logs, and ask the platform for nothing.
resource "google_project_iam_member" "training" {
  project = var.project
  role    = "roles/logging.logWriter"
  member  = google_service_account.training.member
}

# A run creates its training job as the other account.
resource "google_service_account_iam_member" "trainer" {
  service_account_id = google_service_account.training.name
  role               = "roles/iam.serviceAccountUser"
  member             = google_service_account.trainer.member
}

# Data, runs, champions and history. `terraform destroy` refuses while there is anything.
resource "google_storage_bucket" "pipelines" {
  name                        = var.bucket
  location                    = var.region
  uniform_bucket_level_access = true # conditions of IAM need it
  public_access_prevention    = "enforced"
  depends_on                  = [google_project_service.apis]

  versioning {
    enabled = true
  }

  # Else versions that were overwritten or deleted cost money for ever.
  lifecycle_rule {
    action {
      type = "Delete"
    }
    condition {
      days_since_noncurrent_time = 30
    }
  }
}

# Publishes champions, and keeps the history.
resource "google_storage_bucket_iam_member" "trainer" {
  bucket = google_storage_bucket.pipelines.name
  role   = "roles/storage.objectUser"
  member = google_service_account.trainer.member
}

# Reads the data, and ...
resource "google_storage_bucket_iam_member" "training" {
  bucket = google_storage_bucket.pipelines.name
  role   = "roles/storage.objectViewer"
  member = google_service_account.training.member
}

# ... writes only below the pipeline root.
resource "google_storage_bucket_iam_member" "training_runs" {
  bucket = google_storage_bucket.pipelines.name
  role   = "roles/storage.objectUser"
  member = google_service_account.training.member

  condition {
    title      = "runs"
    expression = "resource.name.startsWith(\"projects/_/buckets/${var.bucket}/objects/runs/\")"
  }
}

# Images, and the compiled pipelines of `shardline upload`.
resource "google_artifact_registry_repository" "repositories" {
  for_each      = { shardline = "DOCKER", pipelines = "KFP" }
  location      = var.region
  repository_id = each.key
  format        = each.value
  depends_on    = [google_project_service.apis]
}

# Both accounts start the image.
resource "google_artifact_registry_repository_iam_member" "readers" {
  for_each   = { trainer = google_service_account.trainer.member, training = google_service_account.training.member }
  location   = var.region
  repository = google_artifact_registry_repository.repositories["shardline"].name
  role       = "roles/artifactregistry.reader"
  member     = each.value
}

# The secrets that settings name, without a value, which would be in the state:
# gcloud secrets versions add NAME --data-file=-
resource "google_secret_manager_secret" "secrets" {
  for_each   = var.secrets
  secret_id  = each.value
  depends_on = [google_project_service.apis]

  replication {
    auto {}
  }
}

resource "google_secret_manager_secret_iam_member" "trainer" {
  for_each  = var.secrets
  secret_id = google_secret_manager_secret.secrets[each.value].id
  role      = "roles/secretmanager.secretAccessor"
  member    = google_service_account.trainer.member
}

# Those who push, submit and explain runs; none of them is an administrator.
resource "google_project_iam_member" "submitters" {
  for_each = {
    for pair in setproduct(["roles/aiplatform.user", "roles/logging.viewer"], var.submitters) : join(" ", pair) => pair
  }
  project = var.project
  role    = each.value[0]
  member  = each.value[1]
}

# A run that they submit is the account `trainer`.
resource "google_service_account_iam_member" "submitters" {
  for_each           = var.submitters
  service_account_id = google_service_account.trainer.name
  role               = "roles/iam.serviceAccountUser"
  member             = each.value
}

resource "google_artifact_registry_repository_iam_member" "submitters" {
  for_each   = { for pair in setproduct(["shardline", "pipelines"], var.submitters) : join(" ", pair) => pair }
  location   = var.region
  repository = google_artifact_registry_repository.repositories[each.value[0]].name
  role       = "roles/artifactregistry.writer"
  member     = each.value[1]
}

resource "google_storage_bucket_iam_member" "submitters" {
  for_each = var.submitters
  bucket   = google_storage_bucket.pipelines.name
  role     = "roles/storage.objectUser"
  member   = each.value
}
