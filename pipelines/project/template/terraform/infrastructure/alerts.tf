# The topic that `[notify]` of the settings names.
resource "google_pubsub_topic" "alerts" {
  count      = var.alerts ? 1 : 0
  name       = "${var.prefix}shardline-alerts"
  depends_on = [google_project_service.apis]
}

# The last task of a run publishes how it ended.
resource "google_pubsub_topic_iam_member" "trainer" {
  count  = var.alerts ? 1 : 0
  topic  = google_pubsub_topic.alerts[0].name
  role   = "roles/pubsub.publisher"
  member = google_service_account.trainer.member
}

# Names alone: a value would be in the state. Add it: gcloud secrets versions add NAME --data-file=-
resource "google_secret_manager_secret" "secrets" {
  for_each  = var.secrets
  secret_id = "${var.prefix}shardline-${each.value}"

  replication {
    auto {}
  }

  depends_on = [google_project_service.apis]
}

# Every task reads its secrets as the account of the run.
resource "google_secret_manager_secret_iam_member" "trainer" {
  for_each  = var.secrets
  secret_id = google_secret_manager_secret.secrets[each.value].id
  role      = "roles/secretmanager.secretAccessor"
  member    = google_service_account.trainer.member
}

# The training job logs to the tracking server, and notifies no one.
resource "google_secret_manager_secret_iam_member" "training" {
  for_each  = setintersection(var.secrets, ["mlflow"])
  secret_id = google_secret_manager_secret.secrets[each.value].id
  role      = "roles/secretmanager.secretAccessor"
  member    = google_service_account.training.member
}
