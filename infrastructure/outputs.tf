output "settings" {
  description = "What settings say of all this."
  value       = <<EOT
image = "${var.region}-docker.pkg.dev/${var.project}/shardline/shardline:0.1.0"

[vertex]
project = "${var.project}"
location = "${var.region}"
pipeline_root = "gs://${google_storage_bucket.pipelines.name}/runs"
service_account = "${google_service_account.trainer.email}"
registry = "https://${var.region}-kfp.pkg.dev/${var.project}/pipelines"

[train.job]
service_account = "${google_service_account.training.email}"
EOT
}
