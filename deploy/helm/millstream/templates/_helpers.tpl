{{- define "millstream.name" -}}
{{- printf "%s-%s" .Release.Name "millstream" | trunc 50 | trimSuffix "-" -}}
{{- end -}}

{{- define "millstream.labels" -}}
app.kubernetes.io/name: millstream
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{- define "millstream.selector" -}}
app.kubernetes.io/name: millstream
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "millstream.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
seccompProfile: {type: RuntimeDefault}
{{- end -}}

{{- define "millstream.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end -}}

{{- define "millstream.secretEnv" -}}
- name: MILLSTREAM_URL
  valueFrom: {secretKeyRef: {name: {{ .Values.existingSecret }}, key: url}}
- name: MILLSTREAM_HTTP_TOKEN
  valueFrom: {secretKeyRef: {name: {{ .Values.existingSecret }}, key: token}}
{{- end -}}
