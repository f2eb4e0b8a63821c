{{/* Refuse values that contradict each other; values.schema.json checks each by itself. */}}
{{- define "everstep.checks" -}}
{{- $database := .Values.controller.database -}}
{{- if and (eq $database.kind "sqlite") (gt (int (include "everstep.replicas" .)) 1) -}}
{{- fail "controller.replicas: SQLite is for one controller; set controller.database.kind=postgresql for several" -}}
{{- end -}}
{{- if and (eq $database.kind "postgresql") (not $database.postgresql.secretName) -}}
{{- fail "controller.database.postgresql.secretName is missing: make a Secret with the database's URL and name it" -}}
{{- end -}}
{{- if eq .Values.remediation.backend "webhook" -}}
{{- if not (and .Values.remediation.webhook.url .Values.remediation.webhook.secretName) -}}
{{- fail "remediation.backend=webhook needs remediation.webhook.url and remediation.webhook.secretName" -}}
{{- end -}}
{{- end -}}
{{- if and (eq .Values.remediation.mode "enforce") (eq .Values.remediation.backend "dry_run") -}}
{{- fail "remediation.mode=enforce needs remediation.backend=kubernetes or webhook: dry_run only logs" -}}
{{- end -}}
{{- if and .Values.remediation.evictPods (ne .Values.remediation.backend "kubernetes") -}}
{{- fail "remediation.evictPods needs remediation.backend=kubernetes" -}}
{{- end -}}
{{- if and .Values.alerts.tokenSecretName (not .Values.alerts.url) -}}
{{- fail "alerts.tokenSecretName needs alerts.url" -}}
{{- end -}}
{{- if and .Values.networkPolicy.enabled .Values.agent.enabled .Values.agent.hostNetwork (not .Values.networkPolicy.agentCIDRs) -}}
{{- fail "networkPolicy.agentCIDRs is missing: with agent.hostNetwork, agents connect from the nodes' addresses" -}}
{{- end -}}
{{- $names := list -}}
{{- range .Values.agent.pools -}}
{{- if has .name $names -}}{{- fail (printf "agent.pools: two pools have the name %s" .name) -}}{{- end -}}
{{- $names = append $names .name -}}
{{- include "everstep.refuseManaged" (dict "at" (printf "agent.pools (%s).settings" .name) "settings" (.settings | default dict) "managed" (include "everstep.managed.agent" .)) -}}
{{- end -}}
{{- include "everstep.refuseManaged" (dict "at" "agent.settings" "settings" .Values.agent.settings "managed" (include "everstep.managed.agent" .)) -}}
{{- include "everstep.refuseManaged" (dict "at" "controller.settings" "settings" .Values.controller.settings "managed" (include "everstep.managed.controller" .)) -}}
{{- end }}

{{- define "everstep.refuseManaged" -}}
{{- range $name, $_ := .settings -}}
{{- if has $name (splitList " " $.managed) -}}
{{- fail (printf "%s: the chart sets %s itself, from its other values" $.at $name) -}}
{{- end -}}
{{- end -}}
{{- end }}

{{/* Settings that the templates set. */}}
{{- define "everstep.managed.controller" -}}
preset listen operators_listen advertise name secret_file database database_password_file tls_certificate tls_key remediation_backend kubernetes_evict_pods webhook_url webhook_secret_file alert_url alert_token_file policy_remediation_mode policy_probes_required
{{- end }}
{{- define "everstep.managed.agent" -}}
preset node controller ca_file join_token_file token_file metrics_token_file metrics_listen vault_listen run_dir state_dir segment_dir bundle_dir sysfs_root virtual kernel_log
{{- end }}
