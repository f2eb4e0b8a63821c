{{- define "everstep.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else if contains .Chart.Name .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name .Chart.Name | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end }}

{{/* Labels that select pods. Takes (dict "root" $ "component" NAME). */}}
{{- define "everstep.selector" -}}
app.kubernetes.io/name: everstep
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end }}

{{- define "everstep.labels" -}}
{{ include "everstep.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ .root.Chart.Name }}-{{ .root.Chart.Version | replace "+" "_" }}
{{- end }}

{{/* Takes (dict "root" $ "name" NAME). */}}
{{- define "everstep.image" -}}
{{- $registry := required "image.registry is missing: build the images with deploy/docker/Dockerfile, push them, and give --set image.registry=REGISTRY/PATH" .root.Values.image.registry -}}
{{ trimSuffix "/" $registry }}/{{ .name }}:{{ .root.Values.image.tag | default .root.Chart.AppVersion }}
{{- end }}

{{- define "everstep.replicas" -}}
{{- if kindIs "invalid" .Values.controller.replicas -}}
{{- ternary 2 1 (eq .Values.controller.database.kind "postgresql") -}}
{{- else -}}
{{- .Values.controller.replicas -}}
{{- end -}}
{{- end }}

{{/* Names of Secrets. */}}
{{- define "everstep.secret.fleet" -}}{{ .Values.secrets.fleet | default (printf "%s-fleet" (include "everstep.fullname" .)) }}{{- end }}
{{- define "everstep.secret.join" -}}{{ .Values.secrets.join | default (printf "%s-join" (include "everstep.fullname" .)) }}{{- end }}
{{- define "everstep.secret.metrics" -}}{{ .Values.secrets.metrics | default (printf "%s-metrics" (include "everstep.fullname" .)) }}{{- end }}
{{- define "everstep.secret.tls" -}}{{ .Values.tls.secretName | default (printf "%s-tls" (include "everstep.fullname" .)) }}{{- end }}

{{- define "everstep.scheme" -}}{{ ternary "https" "http" .Values.tls.enabled }}{{- end }}

{{/* URLs of all controllers, each by its own name: clients find the leader among them. */}}
{{- define "everstep.controllers" -}}
{{- $name := include "everstep.fullname" . -}}
{{- $urls := list -}}
{{- range $i := until (int (include "everstep.replicas" .)) -}}
{{- $urls = append $urls (printf "%s://%s-controller-%d.%s-controllers.%s.svc:7700" (include "everstep.scheme" $) $name $i $name $.Release.Namespace) -}}
{{- end -}}
{{- join "," $urls -}}
{{- end }}

{{/* Environment variables from settings. Takes (dict "prefix" PREFIX "settings" MAP). */}}
{{- define "everstep.environment" -}}
{{- range $name, $value := .settings }}
- name: {{ $.prefix }}{{ upper $name }}
  value: {{ include "everstep.text" $value | quote }}
{{- end }}
{{- end }}

{{/* A value as a program reads it: Helm holds whole numbers as floats, and would print large ones with an exponent. */}}
{{- define "everstep.text" -}}
{{- if and (kindIs "float64" .) (eq (float64 (int64 .)) .) -}}
{{- int64 . -}}
{{- else if kindIs "slice" . -}}
{{- join "," . -}}
{{- else -}}
{{- . -}}
{{- end -}}
{{- end }}

{{/* Files that the controller accepts only if no other user can read them, as a list of file, secret and key. */}}
{{- define "everstep.privateFiles" -}}
- { file: fleet, secret: {{ include "everstep.secret.fleet" . }}, key: secret }
{{- with .Values.controller.database }}
{{- if and (eq .kind "postgresql") .postgresql.passwordKey }}
- { file: database-password, secret: {{ .postgresql.secretName }}, key: {{ .postgresql.passwordKey }} }
{{- end }}
{{- end }}
{{- if eq .Values.remediation.backend "webhook" }}
- { file: webhook, secret: {{ .Values.remediation.webhook.secretName }}, key: secret }
{{- end }}
{{- if .Values.alerts.tokenSecretName }}
- { file: alerts, secret: {{ .Values.alerts.tokenSecretName }}, key: token }
{{- end }}
{{- end }}

{{- define "everstep.restricted" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: { drop: [ALL] }
{{- end }}

{{- define "everstep.podSecurity" -}}
runAsNonRoot: true
runAsUser: {{ .Values.user.uid | int64 }}
runAsGroup: {{ .Values.user.gid | int64 }}
fsGroup: {{ .Values.user.gid | int64 }}
seccompProfile: { type: RuntimeDefault }
{{- end }}
