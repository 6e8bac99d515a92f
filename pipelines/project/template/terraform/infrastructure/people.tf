# Grants to those who submit (var.submitters), by command. None of them is an administrator.

# submit, schedule, cancel, status; logs, explain
resource "google_project_iam_member" "submitters" {
  for_each = toset([for pair in setproduct(["roles/aiplatform.user", "roles/logging.viewer"], var.submitters) : join(" ", pair)])
  project  = var.project
  role     = split(" ", each.value)[0]
  member   = split(" ", each.value)[1]
}

# submit, schedule apply: the run is the account `trainer`.
resource "google_service_account_iam_member" "submitters" {
  for_each           = var.submitters
  service_account_id = google_service_account.trainer.name
  role               = "roles/iam.serviceAccountUser"
  member             = each.value
}

# image push
resource "google_artifact_registry_repository_iam_member" "image" {
  for_each   = var.submitters
  location   = var.region
  repository = google_artifact_registry_repository.image.name
  role       = "roles/artifactregistry.writer"
  member     = each.value
}

# upload, and submit from a URL
resource "google_artifact_registry_repository_iam_member" "pipelines" {
  for_each   = var.submitters
  location   = var.region
  repository = google_artifact_registry_repository.pipelines.name
  role       = "roles/artifactregistry.writer"
  member     = each.value
}

# champion, and data to train on
resource "google_storage_bucket_iam_member" "submitters" {
  for_each = var.submitters
  bucket   = google_storage_bucket.pipelines.name
  role     = "roles/storage.objectUser"
  member   = each.value
}
