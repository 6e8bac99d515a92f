# What the runs of my_package need in a project of Google Cloud. In this directory:
#
#   terraform init
#   terraform apply                                      # asks for project and bucket
#   terraform output -raw settings > ../settings.toml    # instead of that of a new project

# The APIs that runs call. They stay on when the rest is destroyed: others in the project may use them.
resource "google_project_service" "apis" {
  for_each = toset(concat(
    ["aiplatform", "artifactregistry", "storage", "logging", "iam", "compute", "cloudresourcemanager", "serviceusage"],
    var.alerts ? ["pubsub"] : [],
    length(var.secrets) > 0 ? ["secretmanager"] : [],
  ))
  service            = "${each.value}.googleapis.com"
  disable_on_destroy = false
}

# Runs, scheduled ones too, are this account: a schedule has no identity of its own.
resource "google_service_account" "trainer" {
  account_id   = "${var.prefix}trainer"
  display_name = "Runs of pipelines"
  depends_on   = [google_project_service.apis]
}

# Training runs the code of models, as an account that cannot write champions.
resource "google_service_account" "training" {
  account_id   = "${var.prefix}training"
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

# Data, runs, champions and history. What is deleted can be restored for seven days, the default of soft delete;
# `terraform destroy` refuses while there is anything.
resource "google_storage_bucket" "pipelines" {
  name                        = var.bucket
  location                    = var.region
  uniform_bucket_level_access = true # conditions of IAM need it
  public_access_prevention    = "enforced"

  versioning {
    enabled = true
  }

  # Else versions that were overwritten, or pruned, cost money for ever.
  lifecycle_rule {
    action {
      type = "Delete"
    }
    condition {
      days_since_noncurrent_time = var.noncurrent_days
    }
  }

  # Only below runs/: champions/ and history/ have no age.
  dynamic "lifecycle_rule" {
    for_each = var.runs_days == null ? [] : [var.runs_days]
    content {
      action {
        type = "Delete"
      }
      condition {
        age            = lifecycle_rule.value
        matches_prefix = ["runs/"]
        with_state     = "LIVE"
      }
    }
  }

  depends_on = [google_project_service.apis]
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

# Images. Each push of a tag leaves one without, which settings may still name by its digest.
resource "google_artifact_registry_repository" "image" {
  location      = var.region
  repository_id = "${var.prefix}shardline"
  format        = "DOCKER"

  dynamic "cleanup_policies" {
    for_each = var.untagged_days == null ? [] : [var.untagged_days]
    content {
      id     = "delete-untagged"
      action = "DELETE"
      condition {
        tag_state  = "UNTAGGED"
        older_than = "${cleanup_policies.value * 86400}s"
      }
    }
  }

  depends_on = [google_project_service.apis]
}

# Compiled pipelines of `shardline upload`.
resource "google_artifact_registry_repository" "pipelines" {
  location      = var.region
  repository_id = "${var.prefix}pipelines"
  format        = "KFP"
  depends_on    = [google_project_service.apis]
}

# Both accounts start the image.
resource "google_artifact_registry_repository_iam_member" "readers" {
  for_each   = { trainer = google_service_account.trainer.member, training = google_service_account.training.member }
  location   = var.region
  repository = google_artifact_registry_repository.image.name
  role       = "roles/artifactregistry.reader"
  member     = each.value
}
