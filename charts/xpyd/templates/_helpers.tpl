{{/* Labels of every object. */}}
{{- define "xpyd.labels" -}}
app.kubernetes.io/name: xpyd-operator
{{- with .Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* Annotations of every object; nothing where there are none. */}}
{{- define "xpyd.annotations" -}}
{{- with .Values.commonAnnotations }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/* repository@digest where there is one, else repository:tag, the tag being the application's version unless given. */}}
{{- define "xpyd.image" -}}
{{ .image.repository }}{{ if .image.digest }}@{{ .image.digest }}{{ else }}:{{ .image.tag | default .root.Chart.AppVersion }}{{ end }}
{{- end }}
